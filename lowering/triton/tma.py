def qualifies(em,buf,op): return False
